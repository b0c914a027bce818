//! The structs that only device code has, against NCCL's bitcode: no host compiler is shown them.

use std::fs;
use std::mem::offset_of;

use devcomm_types::nccl::{CoopAny, LsaBarrierSession};
use libtest_mimic::Trial;

use crate::support::Needs::{Nccl, RustSource};
use crate::support::{Outcome, Package, body, ensure, stderr, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a_barrier_session_is_as_large_as_nccls", &[RustSource, Nccl], session),
        test("a_coop_is_laid_out_as_nccls", &[RustSource, Nccl], coop),
    ]
}

fn session() -> Outcome {
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

fn coop() -> Outcome {
    let package = Package::fixture("layout_coop");
    let folder = package.folder.join("ir");
    let output = package.as_build_script(|command| {
        command.env("DEVCOMM_DUMP_IR", &folder);
    });
    ensure(output.status.success(), stderr(&output))?;
    // Before optimisation the functions of NCCL that take a coop are there, and with them its type.
    let text = fs::read_to_string(folder.join("lsa.before.ll"))?;
    let is_type = |line: &&str| line.starts_with('%') && line.contains("ncclCoopAny");
    let types: Vec<&str> = text.lines().filter(is_type).collect();
    let storage = offset_of!(CoopAny, vtable);
    for wanted in [
        "%struct.ncclCoopAny = type { %\"struct.ncclCoopAny::Storage\", ptr }".to_owned(),
        format!("%\"struct.ncclCoopAny::Storage\" = type {{ [{storage} x i8] }}"),
    ] {
        ensure(types.contains(&wanted.as_str()), format!("no `{wanted}` among {types:#?}"))?;
    }
    ensure(size_of::<CoopAny>() == storage + size_of::<u64>(), "there is more behind the table")
}
