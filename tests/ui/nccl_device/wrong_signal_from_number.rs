//! A bare number is no signal in safe code: it may be a barrier's.

use nccl_device::gin::SignalId;

fn main() {
    let _ = SignalId::from_raw(3);
}
