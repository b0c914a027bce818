//! A struct around a bare number is no signal either.

use nccl_device::gin::SignalId;

fn main() {
    let _ = SignalId(3);
}
