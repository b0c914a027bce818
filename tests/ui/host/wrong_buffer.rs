//! A buffer whose memory is freed with the slice, before an operation is enqueued: `Buffer` is
//! unsafe to implement.

use devcomm_host::{Buffer, Context, DeviceSlice};

struct Fresh(Context);

impl Buffer for Fresh {
    type Element = f32;

    fn device_slice(&self) -> DeviceSlice<f32> {
        self.0.alloc(64).unwrap().device_slice()
    }
}

fn main() {}
