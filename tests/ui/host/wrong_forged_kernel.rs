//! `Kernel` is unsafe to implement: a type could declare an unsafe kernel safe.

use devcomm_kernels::gin_put_signal;
use devcomm_types::{HostBody, Kernel, Safe};

type Unsafe = gin_put_signal;

enum Forged {}

impl Kernel for Forged {
    const NAME: &'static str = Unsafe::NAME;
    const GIN: bool = Unsafe::GIN;
    const PACKAGE: &'static str = Unsafe::PACKAGE;
    const FILE: &'static str = Unsafe::FILE;
    type Args = <Unsafe as Kernel>::Args;
    type Safety = Safe;
    const BODY: Option<HostBody> = Unsafe::BODY;
}

fn main() {}
