"""The commands of the service, one module each: ``add(commands)`` declares it and its options.

Heavy modules are imported where a command runs, so that ``smon --help`` answers at once.
"""
