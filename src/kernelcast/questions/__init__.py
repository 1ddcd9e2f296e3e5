"""What is asked, by the same words from Python, on the command line and over the web: frozen values with an ``answer``.

A field of a question carries its flags and its meaning (``words.Flag``); each face of the program reads them there.
"""

from kernelcast.questions.compare import CompareQuestion
from kernelcast.questions.infer import InferQuestion
from kernelcast.questions.kernel import KernelQuestion
from kernelcast.questions.plan import PlanQuestion
from kernelcast.questions.pools import PoolsQuestion
from kernelcast.questions.simulate import SimulateQuestion
from kernelcast.questions.told import as_command, as_python
from kernelcast.questions.words import Flag, Word, words_of

__all__ = [
    "CompareQuestion", "Flag", "InferQuestion", "KernelQuestion", "PlanQuestion", "PoolsQuestion", "SimulateQuestion",
    "Word", "as_command", "as_python", "words_of",
]  # fmt: skip
