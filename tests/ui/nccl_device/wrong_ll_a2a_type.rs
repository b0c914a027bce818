//! A session of LL all-to-all has one type of element.

use nccl_device::{Coop, LlA2a, LlA2aBuffer};

fn kernel(buffer: LlA2aBuffer<'_>) {
    buffer.with(Coop::cta(), 0, 4, |session: &mut LlA2a<'_, u64>| {
        session.send(0, 0, 5);
        let got: f64 = session.receive(0);
        let _ = got;
    });
}

fn main() {
    let _ = kernel as fn(_);
}
