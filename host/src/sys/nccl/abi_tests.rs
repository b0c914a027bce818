//! The mirrors of NCCL's structs, those of the host's calls and those that kernels get, against NCCL's own headers, as a C++
//! compiler lays them out: every field's offset and size, and the value that NCCL's initializer gives it.
//!
//! What only device code sees (`ncclCoopAny`, `ncclLsaBarrierSession_C`) a host compiler is not shown.

use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

use devcomm_locate::{Part, find_nccl};
use devcomm_types::nccl;

use super::abi::*;
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

/// A struct on our side.
struct Mirror {
    /// C name.
    name: &'static str,
    /// What C initializes it with.
    initializer: &'static str,
    size: usize,
    align: usize,
    fields: Vec<Field>,
}

impl Mirror {
    fn of<T>(name: &'static str, initializer: &'static str, fields: Vec<Field>) -> Self {
        Self { name, initializer, size: size_of::<T>(), align: align_of::<T>(), fields }
    }
}

fn mirrors() -> Vec<Mirror> {
    let mut all = mirrors_of_the_host();
    all.extend(mirrors_of_kernels());
    all
}

/// The structs that the host's calls take.
fn mirrors_of_the_host() -> Vec<Mirror> {
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
        Mirror::of::<Requirements>(
            "ncclDevCommRequirements_t",
            "NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER",
            requirements,
        ),
        Mirror::of::<CommProperties>(
            "ncclCommProperties_t",
            "NCCL_COMM_PROPERTIES_INITIALIZER",
            properties,
        ),
        Mirror::of::<RawUniqueId>("ncclUniqueId", "{}", Vec::new()),
    ]
}

/// The structs that kernels get.
fn mirrors_of_kernels() -> Vec<Mirror> {
    let comm = nccl::DevComm::zeroed();
    let team = fields!(
        comm.world_team(), nccl::Team, "nRanks" n_ranks, "rank" rank, "stride" stride,
    );
    let lsa_barrier = fields!(
        comm.lsa_barrier, nccl::LsaBarrierHandle,
        "bufHandle" buffer, "nBarriers" n_barriers,
    );
    let gin_barrier = fields!(
        comm.rail_gin_barrier, nccl::GinBarrierHandle, "signal0" signal0, "unused" unused,
    );
    let cft_barrier = fields!(
        comm.cft_barrier, nccl::CftBarrierHandle,
        "bufHandle" buffer, "nBarriers" n_barriers,
    );
    let multimem = fields!(comm.lsa_multimem, nccl::MultimemHandle, "mcBasePtr" base);
    let window = fields!(
        comm.resource_window_inlined, nccl::ResourceWindow,
        "lsaFlatBase" lsa_flat_base, "stride4G" stride_4g, "mcOffset4K" mc_offset_4k,
    );
    let comm = fields!(
        comm, nccl::DevComm,
        "magic" magic, "version" version, "rank" rank, "nRanks" n_ranks,
        "nRanks_rcp32" n_ranks_rcp32, "lsaRank" lsa_rank, "lsaSize" lsa_size,
        "lsaSize_rcp32" lsa_size_rcp32, "windowTable" window_table,
        "resourceWindow" resource_window, "resourceWindow_inlined" resource_window_inlined,
        "hybridDenseGinBarrier" hybrid_dense_gin_barrier, "lsaMultimem" lsa_multimem,
        "lsaBarrier" lsa_barrier, "railGinBarrier" rail_gin_barrier,
        "ginConnectionCount" gin_connection_count, "backendIndex" backend_index,
        "ginNetDeviceTypes" gin_net_device_types, "ginHandles" gin_handles,
        "ginSignalCount" gin_signal_count, "ginCounterCount" gin_counter_count,
        "ginSignalShadows" gin_signal_shadows, "ginContextCount" gin_context_count,
        "ginConnectionStride" gin_connection_stride, "ginContextStride" gin_context_stride,
        "ginStrongLegacySignals" gin_strong_legacy_signals, "abortFlag" abort_flag,
        "hybridLsaBarrier" hybrid_lsa_barrier, "hybridRailGinBarrier" hybrid_rail_gin_barrier,
        "worldGinBarrier" world_gin_barrier, "ginConnectionStride_rcp32" gin_connection_stride_rcp32,
        "cftRank" cft_rank, "cftSize" cft_size, "cftMultimemRank" cft_multimem_rank,
        "cftMultimemSize" cft_multimem_size, "cftMultimemSize_rcp32" cft_multimem_size_rcp32,
        "ucLeId" uc_le_id, "mcLeId" mc_le_id, "cftBarrier" cft_barrier,
        "cftMultimemBarrier" cft_multimem_barrier,
    );
    vec![
        Mirror::of::<nccl::Team>("ncclTeam_t", "{}", team),
        Mirror::of::<nccl::LsaBarrierHandle>("ncclLsaBarrierHandle_t", "{}", lsa_barrier),
        Mirror::of::<nccl::GinBarrierHandle>("ncclGinBarrierHandle_t", "{}", gin_barrier),
        Mirror::of::<nccl::CftBarrierHandle>("ncclCftBarrierHandle_t", "{}", cft_barrier),
        Mirror::of::<nccl::MultimemHandle>("ncclMultimemHandle_t", "{}", multimem),
        Mirror::of::<nccl::ResourceWindow>("ncclResourceWindow_vidmem_t", "{}", window),
        Mirror::of::<nccl::DevComm>("ncclDevComm_t", "{}", comm),
        Mirror::of::<nccl::Window<f32>>("ncclWindow_t", "{}", Vec::new()),
    ]
}

/// What our side says, in the lines that the C++ program prints.
fn ours() -> String {
    let mut lines = format!(
        "version {ABI_VERSION}\nmagic {API_MAGIC}\nundef {UNDEF_INT}\nsymmetric {WIN_COLL_SYMMETRIC}\n"
    );
    for Mirror { name, size, align, fields, .. } in mirrors() {
        writeln!(lines, "{name} {size} {align}").unwrap();
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
    for Mirror { name, initializer, fields, .. } in mirrors() {
        writeln!(
            text,
            "{{ {name} v = {initializer}; printf(\"{name} %zu %zu\\n\", sizeof v, alignof({name}));"
        )
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

/// Says why the test cannot run. Where a whole environment is asked for, that is a failure.
fn skip(reason: &str) {
    let required = std::env::var_os("DEVCOMM_REQUIRE_KERNELS").is_some_and(|value| value == "1");
    assert!(!required, "DEVCOMM_REQUIRE_KERNELS is set, and {reason}");
    eprintln!("SKIPPED: {reason}");
}

#[test]
fn every_mirror_has_the_layout_and_the_defaults_of_nccls_headers() {
    let tree = find_nccl(None, Part::Headers, |tree| match tree.version {
        Some(version) if version == DEV_COMM_VERSION => Ok(()),
        other => Err(format!("its headers are of version {other:?}, wanted {DEV_COMM_VERSION}")),
    });
    let include = match tree {
        Ok(tree) => tree.include.unwrap(),
        Err(error) => return skip(&error.to_string()),
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
        Err(error) => {
            return skip(&format!(
                "there is no C++ compiler to read NCCL's headers ({error}); install one that \
                 answers to `c++`, such as g++"
            ));
        }
        Ok(status) => assert!(status.success(), "c++: {status}"),
    }
    let output = Command::new(at("abi")).output().unwrap();
    let theirs = String::from_utf8(output.stdout).unwrap();
    for (ours, theirs) in ours().lines().zip(theirs.lines()) {
        assert_eq!(ours, theirs);
    }
    assert_eq!(ours().lines().count(), theirs.lines().count());
}
