"""Where ranks live: in this process one after another, or in a process group."""
