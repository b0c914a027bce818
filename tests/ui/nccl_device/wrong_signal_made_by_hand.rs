//! Nor is a struct around it.

use nccl_device::gin::SignalId;

fn main() {
    let _ = SignalId(3);
}
