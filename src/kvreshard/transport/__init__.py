"""How do bytes get from one rank's memory into another's? `base` says what a transport is; the others are one each."""
