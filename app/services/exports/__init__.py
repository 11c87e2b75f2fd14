"""Exports: zip files of CSV tables, and traces."""
