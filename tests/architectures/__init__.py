"""Architectures from papers, each one complete file to copy: functions, parameters, a batch."""
