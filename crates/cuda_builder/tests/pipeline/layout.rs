//! Layouts of device-only structs, against NCCL's bitcode.

use std::collections::BTreeSet;
use std::mem::offset_of;

use cuda_builder::device_functions;
use devcomm_locate::{NcclPart, find_nccl};
use devcomm_types::nccl::{CoopAny, LsaBarrierSession};
use libtest_mimic::Trial;

use crate::support::Needs::{Nccl, RustSource};
use crate::support::{Package, TestResult, body, ensure, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a_barrier_session_is_as_large_as_nccls", &[RustSource, Nccl], session),
        test("a_coop_is_laid_out_as_nccls", &[RustSource, Nccl], coop),
    ]
}

fn session() -> TestResult {
    let source = "
unsafe extern \"C-unwind\" {
    fn ncclLsaBarrierSession_C_size() -> usize;
}
#[unsafe(no_mangle)]
pub unsafe extern \"ptx-kernel\" fn session_size(size: *mut usize) {
    unsafe { *size = ncclLsaBarrierSession_C_size() }
}
";
    let artifacts = Package::new("layout_session", source).builder().build()?;
    let body = body(&artifacts, "session_size");
    let stored = body.lines().filter(|line| line.trim().starts_with("st."));
    let stored: Vec<&str> = stored.filter_map(|line| line.rsplit([' ', ';']).nth(1)).collect();
    ensure(
        stored == [size_of::<LsaBarrierSession>().to_string()],
        format!("NCCL's session has {stored:?} bytes"),
    )
}

fn coop() -> TestResult {
    // `coop.rs` proves for every call through the table that it is at this offset.
    const TABLE_AT: usize = 16;
    let nccl = find_nccl(None, NcclPart::Bitcode, |_| Ok(()))?;
    let bitcode = nccl.bitcode.ok_or("the bitcode that was found has no path")?;
    let sizes: BTreeSet<u64> = device_functions(&bitcode)?
        .into_iter()
        .flat_map(|function| function.params)
        .filter_map(|param| param.by_value)
        .filter(|copied| copied.name == "ncclCoopAny")
        .map(|copied| copied.size)
        .collect();
    ensure(offset_of!(CoopAny, vtable) == TABLE_AT, "the table has another offset")?;
    ensure(
        sizes == BTreeSet::from([size_of::<CoopAny>() as u64]),
        format!("NCCL's coop has {sizes:?} bytes"),
    )
}
