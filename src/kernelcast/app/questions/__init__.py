"""Questions: every command's parameters, once, for Python, the command line and the web; frozen dataclasses.

A field carries its flags and its help (``parameters.CommandParameter``); a question that a function of ``kernelcast``
asks too has an ``answer``.
"""
