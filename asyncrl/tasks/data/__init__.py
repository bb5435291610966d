"""Rows of prompts from files and data sets."""
