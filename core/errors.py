"""Errors that reach the user. Each message says what is wrong and what to do, in the user's words."""

from __future__ import annotations


class MoestroError(Exception):
    """Base of every error whose text is meant to be shown as it is; nothing was changed when it is raised."""


class SettingError(MoestroError):
    """A setting has no such name, or its value is outside its bounds."""


class ModelError(MoestroError):
    """The model cannot be loaded: missing, not a Mixture-of-Experts, damaged, or of a kind that is not supported."""


class NotImported(ModelError):
    """The model can be run only after an import, which may refuse it."""


class PromptError(ModelError):
    """The model cannot take what it is asked: its template refuses the chat, or its answer cannot have that form."""


class BudgetError(MoestroError):
    """The device or host memory asked for does not suffice, or is more than the machine has free."""


class DeviceFullError(BudgetError):
    """The device ran out of memory in an answer, and giving up experts did not help."""


class DeviceError(MoestroError):
    """The GPU failed: what was asked of it was not done, and it may do nothing more in this process."""

    @classmethod
    def of(cls, error: BaseException) -> DeviceError:
        """For an error that CUDA reported."""
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        return cls(
            f"The GPU reported an error ({what}). Load the model again; if that does not help, start Moestro again."
        )


class HostError(MoestroError):
    """A thread that computes experts in host memory has ended, or does not finish."""

    @classmethod
    def of(cls, what: str) -> HostError:
        """`what` became of the thread."""
        return cls(
            f"A thread that computes experts in host memory has failed: {what}. Set miss_placement to wait, or load "
            "the model again."
        )


class ContextError(MoestroError):
    """The prompt, or the context asked for, is longer than what the model or the load allows."""


class BusyError(MoestroError):
    """The one model is answering somebody else, or is being loaded."""


class ClosingError(BusyError):
    """The application ends and starts nothing any more."""

    def __init__(self) -> None:
        super().__init__("Moestro is closing.")


class TraceError(MoestroError):
    """A routing trace cannot be read, is damaged, or does not say what is needed."""


class ProfileError(MoestroError):
    """A profile belongs to another model, is damaged, or lacks what is asked of it."""
