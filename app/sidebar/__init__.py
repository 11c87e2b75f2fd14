"""The sidebar: one section a file. Every section has `outputs` and `values()`, so that one redraw serves all tabs."""

from app.sidebar.cache import CacheSection
from app.sidebar.model import ModelSection
from app.sidebar.sampling import SamplingSection
from app.sidebar.substitution import SubstitutionSection

__all__ = ["CacheSection", "ModelSection", "SamplingSection", "SubstitutionSection"]
