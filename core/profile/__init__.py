"""What calibration measured of one model on this machine: the profile, its file, its summary, and buddy lists."""

from core.profile.profile import PARTS, Profile, check_model, load, profile_path, save

__all__ = ["PARTS", "Profile", "check_model", "load", "profile_path", "save"]
