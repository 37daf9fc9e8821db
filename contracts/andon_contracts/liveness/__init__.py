"""Finds out which ranks are alive, slow, hung or dead, for the ranks of our trainer and of a watched loop."""
