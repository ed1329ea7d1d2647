"""Mutants that change nothing that a caller can see, each with the reason.

A row is the file, the function, the changed line as the mutant has it, and why no test can tell.
"""

EQUIVALENT: tuple[tuple[str, str, str, str], ...] = ()
