"""What calibration measured of one model on this machine: the file, and how it is gathered."""

from core.profile.profile import PARTS, FirstTable, Profile, check_model, load, profile_path, save

__all__ = ["PARTS", "FirstTable", "Profile", "check_model", "load", "profile_path", "save"]
