"""Stores and copies expert weights: host memory, disk, links and device slots. Contains no cache policy."""
