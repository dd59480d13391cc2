"""A decoder with five kinds of faults, to test that the fuzzer finds them."""

import os
import random
import signal
import time

import numpy as np


def make(chance: random.Random) -> bytes:
    return bytes([chance.randrange(30)])


def judge(body: bytes) -> str:
    match body[0]:
        case 1:
            raise ValueError("a bug")
        case 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 3:
            np.ones(2**62 // 8)
        case 4:
            np.ones(80 * 2**20).sum()
        case 5:
            began = time.process_time()
            while time.process_time() < began + 1.1:
                pass
        case _:
            pass
    return "accepted"
