"""The OpenAI API over HTTP, for one or several engines in one process."""
