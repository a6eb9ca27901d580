"""What a deployment needs beside a model: the registry of takedown requests."""
