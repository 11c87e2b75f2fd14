"""Settings of calibration: what its networks are trained on, and their sizes. They act when a model is calibrated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from core.settings.param import Param, checked_values
from core.types import ModelShape


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """How a profile is measured. Build with `CalibrationSettings.checked(...)` from untrusted values.

    Estimator: Speculating Experts sections 6.1 and 6.2 and appendix A. Routing path: ExpertFlow section 3.1.2.
    """

    estimator_input: Annotated[
        Literal["hidden", "quasi"],
        Param(
            "What the estimator is fed, in training and when it predicts. hidden = this layer's router input. quasi = "
            "the quasi-hidden state, as in the paper: the residual stream with the chosen experts' default vectors, "
            "which are measured with it, through the next router's norm; layers without one take the router input.",
            title="Estimator: input",
        ),
    ] = "hidden"
    estimator_width: Annotated[
        int,
        Param(
            "Width of the estimator's inner layers. Wider ones learn more from many tokens, and take longer to train "
            "and to run. 0 = in proportion to the model's hidden size as the paper's 17 million parameters for "
            "Qwen3-30B-A3B, which are a width of 2400.",
            title="Estimator: width",
            low=0,
            high=8192,
            step=8,
        ),
    ] = 256
    estimator_tokens: Annotated[
        int,
        Param(
            "Train the estimator on at most this many of the tokens read, drawn evenly from all of them. Their states "
            "are on disk meanwhile, about 2 (H + E) bytes a token and layer. The paper trains on 4 to 5 million.",
            title="Estimator: trained on",
            low=16,
            high=100_000_000,
            step=1,
            unit="tokens",
        ),
    ] = 8192

    def width_for(self, hidden: int) -> int:
        """The estimator's width, for a model of so wide hidden states."""
        return self.estimator_width or max(8, round(hidden * 2400 / 2048))

    def training_bytes(self, shape: ModelShape, tokens: int) -> int:
        """Bytes on disk of the estimator's training data, when `tokens` tokens are read: a 16-bit state and router
        distribution a token and layer but the first, and for a quasi-hidden state the chosen experts and weights."""
        chosen = 6 * shape.top_k if self.estimator_input == "quasi" else 0
        each = 2 + 2 * (shape.hidden + shape.experts) + chosen
        return min(tokens, self.estimator_tokens) * (shape.layers - 1) * each

    path_texts: Annotated[
        Literal["generated", "read"],
        Param(
            "What the routing-path predictor learns from. generated = the model answers the prompts of the texts, and "
            "again with other draws until there are enough tokens, at most eight answers a prompt, as in the paper; "
            "this takes as long as so many tokens of answers do. read = the texts as they are. Recorded routing counts "
            "as well.",
            title="Routing path: texts",
        ),
    ] = "generated"
    path_tokens: Annotated[
        int,
        Param(
            "Train the routing-path predictor on at most this many tokens, prompts included. Their experts are on disk "
            "meanwhile, L k bytes a token (twice that with more than 256 experts a layer). The most tokens to read, if "
            "there is such a limit, holds here as well.",
            title="Routing path: trained on",
            low=16,
            high=100_000_000,
            step=1,
            unit="tokens",
        ),
    ] = 16_384
    path_answer: Annotated[
        int,
        Param(
            "The longest answer that is generated for it.",
            title="Routing path: longest answer",
            low=1,
            high=8192,
            step=1,
            unit="tokens",
        ),
    ] = 256

    def path_most(self, limit: int) -> int:
        """The most tokens that the routing path learns from; `limit` = most tokens to read, 0 = no limit."""
        return min(self.path_tokens, limit or self.path_tokens)

    @classmethod
    def checked(cls, **values: object) -> CalibrationSettings:
        """Build from untrusted values. Raises SettingError with the bounds."""
        return cls(**checked_values(cls, values, "calibration"))
