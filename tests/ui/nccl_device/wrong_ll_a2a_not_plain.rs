//! An element that is sent consists of plain bytes.

use nccl_device::{Coop, LlA2aBuffer};

fn kernel(buffer: LlA2aBuffer<'_>) {
    buffer.with::<&'static u32, ()>(Coop::cta(), 0, 4, |_| ());
}

fn main() {
    let _ = kernel as fn(_);
}
