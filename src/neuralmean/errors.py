"""Every error and warning that neuralmean raises on purpose.

    NeuralMeanError
    ├── InputError (ValueError)                 an argument or an input that cannot be used
    │   ├── ModelInputError (RuntimeError)      the model itself could not run on the input
    │   └── UsageError                          a command called with wrong options
    ├── LayerNotFoundError (LookupError)        a layer name that the model does not have
    ├── LayerNotFiredError (RuntimeError)       a watched layer that took no part in the forward pass
    ├── NotFittedError (RuntimeError)           a result that needs `fit` or `calibrate` first
    ├── CalibrationError (ValueError)           too few examples for the false-alarm rate asked for
    ├── ModelMismatchError (ValueError)         another model, or other weights, than at `fit`
    ├── ArtefactError (ValueError)              a saved file that cannot be read or written
    ├── StorageError (OSError)                  no space on disk for a table that does not fit in memory
    └── MissingExtraError (ImportError)         an optional package that is not installed

    NeuralMeanWarning (UserWarning)
    └── CalibrationWarning                      a threshold whose guarantee is weaker than it seems

The first sentence of a message says what was expected and what was given, the second what to do.
"""


class NeuralMeanError(Exception):
    """Base of every error of this library."""


class InputError(NeuralMeanError, ValueError):
    """An argument or an input that cannot be used."""


class ModelInputError(InputError, RuntimeError):
    """The model could not run on the input."""


class UsageError(InputError):
    """A command was called with wrong options."""


class LayerNotFoundError(NeuralMeanError, LookupError):
    """A layer name that the model does not have."""


class LayerNotFiredError(NeuralMeanError, RuntimeError):
    """A watched layer that took no part in the forward pass."""


class NotFittedError(NeuralMeanError, RuntimeError):
    """A result that needs `fit` or `calibrate` first."""


class CalibrationError(NeuralMeanError, ValueError):
    """Too few examples for the false-alarm rate asked for."""


class ModelMismatchError(NeuralMeanError, ValueError):
    """The model is not the one that the detector was fitted on."""


class ArtefactError(NeuralMeanError, ValueError):
    """A saved file that cannot be read or written."""


class StorageError(NeuralMeanError, OSError):
    """There is no space on disk for a table that does not fit in memory."""


class MissingExtraError(NeuralMeanError, ImportError):
    """An optional package that is not installed."""


class NeuralMeanWarning(UserWarning):
    """Base of every warning of this library."""


class CalibrationWarning(NeuralMeanWarning):
    """The guarantee of a threshold is weaker than it seems."""
