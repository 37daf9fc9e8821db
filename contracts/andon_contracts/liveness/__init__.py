"""Who is alive, slow, hung or dead, and in which words: for the ranks of our trainer and of a watched loop."""
