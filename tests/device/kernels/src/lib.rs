//! Kernels that test the typed device API, one file per topic.
//!
//! All but those in [`epilogue`], [`launches`], [`peer_reg_tiles`], [`peer_tiles`],
//! [`tile_exchange`] and [`tiles`] take the same parameters, so that one test body can run any of
//! them in the simulator and on GPUs: the device communicator, a window `mail` for the exchanged
//! data, a window `out` for results, [`Extra`] handles, and a parameter `n`.
//!
//! # Safety model
//!
//! The contract of each kernel is the same: the windows and the device communicator are those that
//! its test case (`tests/device/src/cases`) sets up.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![allow(clippy::missing_safety_doc, reason = "the contract is the crate's")]

mod extra;

#[path = ""]
mod files {
    pub mod barriers_gin;
    pub mod barriers_lsa;
    pub mod coops;
    pub mod epilogue;
    pub mod gin;
    pub mod gin_bytes;
    pub mod gin_waits;
    pub mod launches;
    pub mod ll_a2a;
    pub mod memory;
    pub mod peer_reg_tiles;
    pub mod peer_tiles;
    pub mod stuck;
    pub mod tile_exchange;
    pub mod tiles;
    pub mod wrong;
}

pub use extra::{Args, Extra, Range};
pub use files::{epilogue, launches, peer_reg_tiles, peer_tiles, tile_exchange, tiles};
// On the GPU a kernel is only an entry point, so there is nothing to import.
#[allow(unused_imports)]
pub use files::{
    barriers_gin::*, barriers_lsa::*, coops::*, epilogue::*, gin::*, gin_bytes::*, gin_waits::*,
    launches::*, ll_a2a::*, memory::*, peer_reg_tiles::peer_reg_tiles_sum,
    peer_tiles::peer_tiles_sum, stuck::*, tile_exchange::product_and_sum, tiles::*, wrong::*,
};
