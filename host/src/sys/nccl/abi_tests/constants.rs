//! Compares this crate's constants with NCCL's headers.

use devcomm_types::{DataType, GinConnectionType, GinType};

use super::{compare, printed};
use crate::communicator::{
    CftTeamMode, CtaPolicy, GraphUsageMode, HostCftMode, MemoryStat, NvlsHostMode, ReduceOp,
    SUSPEND_MEMORY, ShrinkMode, UniqueId, WindowFlags,
};
use crate::error::NcclResult;
use devcomm_sys::nccl::*;

type Constants = Vec<(&'static str, i64)>;

/// Returns the C name and this crate's value of each constant.
fn constants() -> Constants {
    [limits(), results(), types(), settings()].concat()
}

fn int(value: std::ffi::c_int) -> i64 {
    value.into()
}

fn limits() -> Constants {
    vec![
        ("NCCL_VERSION_CODE", ABI_VERSION.into()),
        ("NCCL_API_MAGIC", API_MAGIC.into()),
        ("NCCL_UNIQUE_ID_BYTES", UniqueId::BYTES as i64),
        ("NCCL_CONFIG_UNDEF_INT", int(UNDEF_INT)),
        ("NCCL_WIN_DEFAULT", int(WindowFlags::empty().bits())),
        ("NCCL_WIN_COLL_SYMMETRIC", int(WindowFlags::COLL_SYMMETRIC.bits())),
        ("NCCL_WIN_STRICT_ORDERING", int(WindowFlags::STRICT_ORDERING.bits())),
        ("NCCL_WIN_GIN_ONLY", int(WindowFlags::GIN_ONLY.bits())),
        ("NCCL_WIN_CFT_COUNTED", int(WindowFlags::CFT_COUNTED.bits())),
        ("NCCL_SHRINK_DEFAULT", ShrinkMode::Idle as i64),
        ("NCCL_SHRINK_ABORT", ShrinkMode::Abort as i64),
        ("ncclStatGpuMemSuspend", MemoryStat::Suspendable as i64),
        ("ncclStatGpuMemSuspended", MemoryStat::Suspended as i64),
        ("ncclStatGpuMemPersist", MemoryStat::Persistent as i64),
        ("ncclStatGpuMemTotal", MemoryStat::Total as i64),
        ("NCCL_CFT_TEAM_FLAT", CftTeamMode::Flat as i64),
        ("NCCL_CFT_TEAM_HIER_MULTIMEM", CftTeamMode::HierarchicalMultimem as i64),
        ("NCCL_CFT_TEAM_HIER_LSA", CftTeamMode::HierarchicalLsa as i64),
        ("NCCL_SUSPEND_MEM", int(SUSPEND_MEMORY)),
        ("NCCL_GIN_TYPE_NONE", int(GinType::None.raw())),
        ("NCCL_GIN_TYPE_PROXY", int(GinType::Proxy.raw())),
        ("NCCL_GIN_TYPE_GDAKI", int(GinType::Gdaki.raw())),
        ("NCCL_GIN_TYPE_GPI", int(GinType::Gpi.raw())),
        ("NCCL_GIN_TYPE_EFA_GDA", int(GinType::EfaGda.raw())),
        ("NCCL_GIN_CONNECTION_NONE", int(GinConnectionType::None.raw())),
        ("NCCL_GIN_CONNECTION_FULL", int(GinConnectionType::Full.raw())),
        ("NCCL_GIN_CONNECTION_RAIL", int(GinConnectionType::Rail.raw())),
        ("NCCL_GIN_CONNECTION_CUSTOM_STRIDE", int(GinConnectionType::CustomStride.raw())),
    ]
}

fn results() -> Constants {
    vec![
        ("ncclSuccess", int(NcclResult::Success.raw())),
        ("ncclUnhandledCudaError", int(NcclResult::UnhandledCudaError.raw())),
        ("ncclSystemError", int(NcclResult::SystemError.raw())),
        ("ncclInternalError", int(NcclResult::InternalError.raw())),
        ("ncclInvalidArgument", int(NcclResult::InvalidArgument.raw())),
        ("ncclInvalidUsage", int(NcclResult::InvalidUsage.raw())),
        ("ncclRemoteError", int(NcclResult::RemoteError.raw())),
        ("ncclInProgress", int(NcclResult::InProgress.raw())),
        ("ncclTimeout", int(NcclResult::Timeout.raw())),
        // One more than the last, so that a new result is noticed.
        ("ncclNumResults", int(NcclResult::Timeout.raw()) + 1),
        ("ncclSuccess", int(SUCCESS)),
        ("ncclInProgress", int(IN_PROGRESS)),
        ("ncclInvalidArgument", int(super::super::params::INVALID_ARGUMENT)),
    ]
}

fn types() -> Constants {
    vec![
        ("ncclChar", DataType::Char as i64),
        ("ncclInt", DataType::Int as i64),
        ("ncclHalf", DataType::Half as i64),
        ("ncclFloat", DataType::Float as i64),
        ("ncclDouble", DataType::Double as i64),
        ("ncclInt8", DataType::Int8 as i64),
        ("ncclUint8", DataType::Uint8 as i64),
        ("ncclInt32", DataType::Int32 as i64),
        ("ncclUint32", DataType::Uint32 as i64),
        ("ncclInt64", DataType::Int64 as i64),
        ("ncclUint64", DataType::Uint64 as i64),
        ("ncclFloat16", DataType::Float16 as i64),
        ("ncclFloat32", DataType::Float32 as i64),
        ("ncclFloat64", DataType::Float64 as i64),
        ("ncclBfloat16", DataType::Bfloat16 as i64),
        ("ncclFloat8e4m3", DataType::Float8e4m3 as i64),
        ("ncclFloat8e5m2", DataType::Float8e5m2 as i64),
        ("ncclNumTypes", DataType::ALL.len() as i64),
        ("ncclSum", ReduceOp::Sum as i64),
        ("ncclProd", ReduceOp::Prod as i64),
        ("ncclMax", ReduceOp::Max as i64),
        ("ncclMin", ReduceOp::Min as i64),
        ("ncclAvg", ReduceOp::Avg as i64),
        ("ncclNumOps", ReduceOp::ALL.len() as i64),
    ]
}

fn settings() -> Constants {
    vec![
        ("NCCL_ENCRYPTION_MODE_NONE", int(EncryptionConfig::new().mode)),
        ("NCCL_ENCRYPTION_MODE_PSK", int(super::super::params::ENCRYPTION_PSK)),
        ("NCCL_CTA_POLICY_DEFAULT", int(CtaPolicy::DEFAULT.bits())),
        ("NCCL_CTA_POLICY_EFFICIENCY", int(CtaPolicy::EFFICIENCY.bits())),
        ("NCCL_CTA_POLICY_ZERO", int(CtaPolicy::ZERO.bits())),
        ("ncclHostCftDefault", int(UNDEF_INT)),
        ("ncclHostCftEnable", HostCftMode::Enable as i64),
        ("ncclHostCftDisable", HostCftMode::Disable as i64),
        ("ncclHostCftFallback", HostCftMode::Fallback as i64),
        ("ncclNvlsHostModeDefault", int(UNDEF_INT)),
        ("ncclNvlsHostModeEnable", int(NvlsHostMode::ENABLE.bits())),
        ("ncclNvlsHostModeDisableTransport", int(NvlsHostMode::DISABLE_TRANSPORT.bits())),
        (
            "ncclNvlsHostModeDisableSymmetricMultimem",
            int(NvlsHostMode::DISABLE_SYMMETRIC_MULTIMEM.bits()),
        ),
        ("ncclNvlsHostModeDisable", int(NvlsHostMode::DISABLE.bits())),
    ]
}

#[test]
fn every_constant_has_the_value_of_nccls_headers() {
    let mut program = String::from("int main() {\n");
    let mut ours = String::new();
    for (name, value) in constants() {
        program += &format!("printf(\"{name} %lld\\n\", (long long)({name}));\n");
        ours += &format!("{name} {value}\n");
    }
    if let Some(theirs) = printed(&(program + "}\n")) {
        compare(&ours, &theirs);
    }
}

#[test]
fn the_graph_usage_modes_have_the_numbers_that_nccl_documents() {
    // The headers have no names for them.
    let modes = [GraphUsageMode::NoGraph, GraphUsageMode::OneGraph, GraphUsageMode::Mixed];
    assert_eq!(modes.map(|mode| mode as i32), [0, 1, 2]);
}
