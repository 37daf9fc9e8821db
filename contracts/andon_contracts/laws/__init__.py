"""The laws: what must hold at each point of a step, each said once for everybody who judges there."""
