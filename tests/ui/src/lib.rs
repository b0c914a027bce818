//! Correct code that must compile. Each case that must not compile differs from it in one thing.
#![allow(dead_code, reason = "nothing runs")]

mod right_launch;
mod right_uses;
