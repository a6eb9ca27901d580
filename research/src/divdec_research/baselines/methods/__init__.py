"""Other unlearning methods, one in each file: settings, algorithm and registration.

`divdec --help` reads these files, so they import torch and transformers inside functions.
"""
