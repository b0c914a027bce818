//! `IntoArg` is unsafe to implement: an `impl` could make a window longer than its buffer.

use devcomm_types::{IntoArg, Window};

struct Longer(Window<f32>);

impl IntoArg<Window<f32>> for Longer {
    fn into_arg(self) -> Window<f32> {
        Window::new(self.0.handle, 1 << 30)
    }
}

fn main() {}
