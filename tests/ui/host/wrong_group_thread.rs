//! NCCL's groups belong to a thread: an open one cannot be handed to another.

use devcomm_host::{Error, group};

fn main() {
    let _ = group(|g| {
        std::thread::scope(|scope| {
            scope.spawn(|| g.len());
        });
        Ok::<_, Error>(())
    });
}
