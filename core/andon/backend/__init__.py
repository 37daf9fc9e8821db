"""Where ranks live: in this process one after another, in its threads, or in a process group."""
