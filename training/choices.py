"""What options of training can be, for the command line and the configuration alike."""

from typing import Literal

Method = Literal["moa", "eagle2", "eagle3", "independent"]
TokenLossKind = Literal["kl", "tv", "lk"]
Optimizer = Literal["adamw", "muon"]
Schedule = Literal["constant", "cosine", "linear"]
Precision = Literal["bfloat16", "float32"]
PrecisionOrAuto = Literal["auto", "bfloat16", "float32"]
