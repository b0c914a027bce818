//! Tests of the device API. They are one program, because each test program contains all kernels.

mod epilogue;
mod gin;
mod launches;
mod ll_a2a;
mod lsa;
mod peer_reg_tiles;
mod peer_tiles;
mod stuck;
mod tile_exchange;
mod tiles;
mod wrong;
