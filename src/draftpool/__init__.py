"""draftpool: which drafter should write the next block?"""

__version__ = "0.1.0"
