//! What compiles: the wrong uses beside it differ from these in one thing each.
#![allow(dead_code, reason = "nothing runs")]

mod right_launch;
mod right_uses;
