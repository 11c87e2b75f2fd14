"""The sidebar, one section per file. Every section has `outputs` and `values()`, so that one redraw serves all tabs."""

from app.ui.sidebar.cache import CacheSection
from app.ui.sidebar.model import ModelSection
from app.ui.sidebar.sampling import SamplingSection
from app.ui.sidebar.substitution import SubstitutionSection

__all__ = ["CacheSection", "ModelSection", "SamplingSection", "SubstitutionSection"]
