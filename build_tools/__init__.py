"""Decisions of the native build as pure functions: nothing here imports torch, so every one is
tested without a toolkit.
"""
