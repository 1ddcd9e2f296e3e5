"""What is asked, by the same words from Python, on the command line and over the web: frozen values with an ``answer``.

A field of a question carries its flags and its meaning (``words.Flag``); each face of the program reads them there.
"""

from kernelcast.app.questions.compare import CompareQuestion
from kernelcast.app.questions.infer import InferQuestion
from kernelcast.app.questions.kernel import KernelQuestion
from kernelcast.app.questions.plan import PlanQuestion
from kernelcast.app.questions.pools import PoolsQuestion
from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.app.questions.told import as_command, as_python
from kernelcast.app.questions.words import Flag, Word, words_of

__all__ = [
    "CompareQuestion", "Flag", "InferQuestion", "KernelQuestion", "PlanQuestion", "PoolsQuestion", "SimulateQuestion",
    "Word", "as_command", "as_python", "words_of",
]  # fmt: skip
