"""Thousands of requests between many engines while everything that can go wrong does: nothing may be lost, nothing be wrong."""
