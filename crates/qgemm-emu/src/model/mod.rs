//! Models of the instructions that a warp executes together, on the registers of its 32 lanes.
