//! `Buffer` is unsafe to implement: a buffer's memory could be freed with the slice, before an
//! operation is enqueued.

use devcomm_host::{Buffer, Context, DeviceSlice};

struct Fresh(Context);

impl Buffer for Fresh {
    type Element = f32;

    fn device_slice(&self) -> DeviceSlice<f32> {
        self.0.alloc(64).unwrap().device_slice()
    }
}

fn main() {}
