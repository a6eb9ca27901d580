"""Reading a registry of takedown requests while it changes: key, log, sealed counts, and the experts made of them.

`divdec.takedowns.registry` writes what is read here.
"""
