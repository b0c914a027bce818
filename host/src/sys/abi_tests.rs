//! The mirrors of NCCL's host structs against NCCL's own headers, as a C++ compiler lays them out: every field's offset and
//! size, and the value that NCCL's initializer gives it.

use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

use devcomm_locate::{Part, find_nccl};

use super::nccl_abi::*;
use crate::library::DEV_COMM_VERSION;

/// NCCL's headers name a few types of CUDA's, whose headers are seldom there. None of them is in a struct by value but an enum.
const CUDA_STANDIN: &str = "#pragma once
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 } CUmemLocationType;
";

/// A field: C name, offset, size, initial value.
type Field = (&'static str, usize, usize, Option<i64>);

macro_rules! fields {
    ($value:expr, $type:ty, $($c:literal $field:ident $($int:ident)?),* $(,)?) => {{
        let value: $type = $value;
        vec![$( (
            $c,
            offset_of!($type, $field),
            size_of_val(&value.$field),
            fields!(@ value $field $($int)?),
        ) ),*]
    }};
    (@ $value:ident $field:ident int) => { Some($value.$field as i64) };
    (@ $value:ident $field:ident) => { None };
}

/// Each mirror: C name, size, fields.
fn mirrors() -> Vec<(&'static str, &'static str, usize, Vec<Field>)> {
    let requirements = fields!(
        Requirements::new(), Requirements,
        "size" size int, "magic" magic int, "version" version int,
        "resourceRequirementsList" resource_requirements_list,
        "teamRequirementsList" team_requirements_list,
        "lsaMultimem" lsa_multimem int, "barrierCount" barrier_count int,
        "lsaBarrierCount" lsa_barrier_count int, "railGinBarrierCount" rail_gin_barrier_count int,
        "lsaLLA2ABlockCount" lsa_ll_a2a_block_count int, "lsaLLA2ASlotCount" lsa_ll_a2a_slot_count int,
        "ginForceEnable" gin_force_enable int, "ginContextCount" gin_context_count int,
        "ginSignalCount" gin_signal_count int, "ginCounterCount" gin_counter_count int,
        "ginConnectionType" gin_connection_type int,
        "ginExclusiveContexts" gin_exclusive_contexts int, "ginQueueDepth" gin_queue_depth int,
        "ginTrafficClass" gin_traffic_class int, "worldGinBarrierCount" world_gin_barrier_count int,
        "ginStrongSignalsRequired" gin_strong_signals_required int,
        "ginVaSignalsRequired" gin_va_signals_required int, "ginCustomStride" gin_custom_stride int,
        "ginType" gin_type int, "useRuntimeVersion" use_runtime_version int,
        "cftCaps" cft_caps int, "cftBarrierCount" cft_barrier_count int,
    );
    let properties = fields!(
        CommProperties::new(), CommProperties,
        "size" size int, "magic" magic int, "version" version int, "rank" rank int,
        "nRanks" n_ranks int, "cudaDev" cuda_dev int, "nvmlDev" nvml_dev int,
        "deviceApiSupport" device_api_support int, "multimemSupport" multimem_support int,
        "ginType" gin_type int, "nLsaTeams" n_lsa_teams int, "hostRmaSupport" host_rma_support int,
        "railedGinType" railed_gin_type int, "commHash" comm_hash int,
        "ginMinStride" gin_min_stride int, "ginConnectionType" gin_connection_type int,
        "ginSupport" gin_support, "devCommRuntimeVersionSize" dev_comm_runtime_version_size int,
        "cftSupport" cft_support int, "cftMulticastSupport" cft_multicast_support int,
        "cftCountedSupport" cft_counted_support int,
    );
    vec![
        (
            "ncclDevCommRequirements_t",
            "NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER",
            size_of::<Requirements>(),
            requirements,
        ),
        (
            "ncclCommProperties_t",
            "NCCL_COMM_PROPERTIES_INITIALIZER",
            size_of::<CommProperties>(),
            properties,
        ),
        ("ncclUniqueId", "{}", size_of::<RawUniqueId>(), Vec::new()),
    ]
}

/// What our side says, in the lines that the C++ program prints.
fn ours() -> String {
    let mut lines = format!(
        "version {ABI_VERSION}\nmagic {API_MAGIC}\nundef {UNDEF_INT}\nsymmetric {WIN_COLL_SYMMETRIC}\n"
    );
    for (name, _, size, fields) in mirrors() {
        writeln!(lines, "{name} {size}").unwrap();
        for (field, offset, size, value) in fields {
            write!(lines, "{name}.{field} {offset} {size}").unwrap();
            if let Some(value) = value {
                write!(lines, " {value}").unwrap();
            }
            lines.push('\n');
        }
    }
    lines
}

fn program() -> String {
    let mut text = String::from(
        "#include <cstddef>\n#include <cstdio>\n#include <nccl.h>\n#include <nccl_device.h>\nint main() {\n\
         printf(\"version %d\\nmagic %u\\nundef %d\\nsymmetric %d\\n\", NCCL_VERSION_CODE, \
         NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT, NCCL_WIN_COLL_SYMMETRIC);\n",
    );
    for (name, initializer, _, fields) in mirrors() {
        writeln!(text, "{{ {name} v = {initializer}; printf(\"{name} %zu\\n\", sizeof v);")
            .unwrap();
        for (field, _, _, value) in fields {
            let (format, extra) = match value {
                Some(_) => (" %lld", format!(", (long long)v.{field}")),
                None => ("", String::new()),
            };
            writeln!(
                text,
                "printf(\"{name}.{field} %zu %zu{format}\\n\", offsetof({name}, {field}), sizeof v.{field}{extra});"
            )
            .unwrap();
        }
        text.push_str("(void)v; }\n");
    }
    text + "}\n"
}

#[test]
fn every_mirror_has_the_layout_and_the_defaults_of_nccls_headers() {
    let tree = find_nccl(None, Part::Headers, |tree| match tree.version {
        Some(version) if version == DEV_COMM_VERSION => Ok(()),
        other => Err(format!("its headers are of version {other:?}, wanted {DEV_COMM_VERSION}")),
    });
    let include = match tree {
        Ok(tree) => tree.include.unwrap(),
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for header in ["cuda.h", "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"] {
        let text = if header == "cuda.h" { CUDA_STANDIN } else { "#include \"cuda.h\"\n" };
        std::fs::write(at(header), text).unwrap();
    }
    std::fs::write(at("abi.cc"), program()).unwrap();
    let mut compiler = Command::new("c++");
    compiler.arg("-std=c++17").arg("-I").arg(folder.path()).arg("-I").arg(include);
    match compiler.arg(at("abi.cc")).arg("-o").arg(at("abi")).status() {
        Err(error) => return eprintln!("SKIPPED: no C++ compiler: {error}"),
        Ok(status) => assert!(status.success(), "c++: {status}"),
    }
    let output = Command::new(at("abi")).output().unwrap();
    let theirs = String::from_utf8(output.stdout).unwrap();
    for (ours, theirs) in ours().lines().zip(theirs.lines()) {
        assert_eq!(ours, theirs);
    }
    assert_eq!(ours().lines().count(), theirs.lines().count());
}
