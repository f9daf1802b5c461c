"""Import path of the reference API for weights in the released layout; the code is in `dsv41.weights`."""

from dsv41.weights.reading import LoadAudit, load_released
from dsv41.weights.saving import save_for_transformers, save_released
from dsv41.weights.writing import SaveAudit

__all__ = ["LoadAudit", "SaveAudit", "load_released", "save_for_transformers", "save_released"]
