import numpy as np

from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label

SAMPLING = m.SamplingSettings(1.0, 1.0, 0, 4)


AT = Label(1, 3)


def call(
    number: int, *, least: Label = AT, exact: Label | None = None, stream: int = 0
) -> m.GenerationCall:
    prompt = np.array([3, 4], "<i4").tobytes()
    return m.GenerationCall(number, 7, 1, "train", prompt, 4, SAMPLING, least, exact, 5, stream)
