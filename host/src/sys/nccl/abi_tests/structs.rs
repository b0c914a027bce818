//! Compares the Rust mirrors of NCCL's structs, for host calls and for kernels, with the headers:
//! every field's offset, size and initial value.

use std::fmt::Write as _;
use std::mem::offset_of;
use std::ptr::null_mut;

use devcomm_types::nccl;

use super::{compare, printed};
use devcomm_sys::nccl::*;

/// A field: C name, offset, size, and initial value as a number, `None` if it is not compared.
type Field = (&'static str, usize, usize, Option<i64>);

macro_rules! fields {
    ($value:expr, $type:ty, $($c:literal $field:ident $($kind:ident)?),* $(,)?) => {{
        let value: $type = $value;
        vec![$( (
            $c,
            offset_of!($type, $field),
            size_of_val(&value.$field),
            fields!(@ value $field $($kind)?),
        ) ),*]
    }};
    (@ $value:ident $field:ident int) => { Some($value.$field as i64) };
    (@ $value:ident $field:ident float) => { Some(i64::from($value.$field.to_bits())) };
    (@ $value:ident $field:ident null) => { Some($value.$field as i64) };
    (@ $value:ident $field:ident) => { None };
}

/// A Rust mirror of a C struct.
struct Mirror {
    /// C name.
    name: &'static str,
    /// The initializer in C.
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
    let mut all = host_mirrors();
    all.extend(configurations());
    all.extend(nodes());
    all.extend(kernel_mirrors());
    all
}

/// Returns the structs of host calls.
fn host_mirrors() -> Vec<Mirror> {
    let requirements = fields!(
        Requirements::new(), Requirements,
        "size" size int, "magic" magic int, "version" version int,
        "resourceRequirementsList" resource_requirements_list null,
        "teamRequirementsList" team_requirements_list null,
        "lsaMultimem" lsa_multimem int, "barrierCount" barrier_count int,
        "lsaBarrierCount" lsa_barrier_count int, "railGinBarrierCount" rail_gin_barrier_count int,
        "lsaLLA2ABlockCount" lsa_ll_a2a_block_count int,
        "lsaLLA2ASlotCount" lsa_ll_a2a_slot_count int,
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

/// Returns the configurations, whose unset fields must have NCCL's value for undefined.
fn configurations() -> Vec<Mirror> {
    let config = fields!(
        Config::new(), Config,
        "size" size int, "magic" magic int, "version" version int, "blocking" blocking int,
        "cgaClusterSize" cga_cluster_size int, "minCTAs" min_ctas int, "maxCTAs" max_ctas int,
        "netName" net_name null, "splitShare" split_share int, "trafficClass" traffic_class int,
        "commName" comm_name null, "collnetEnable" collnet_enable int, "CTAPolicy" cta_policy int,
        "shrinkShare" shrink_share int, "nvlsCTAs" nvls_ctas int,
        "nChannelsPerNetPeer" n_channels_per_net_peer int,
        "nvlinkCentricSched" nvlink_centric_sched int, "graphUsageMode" graph_usage_mode int,
        "numRmaCtx" num_rma_ctx int, "maxP2pPeers" max_p2p_peers int,
        "graphStreamOrdering" graph_stream_ordering int,
        "launchOrderImplicit" launch_order_implicit int, "numRmaSig" num_rma_sig int,
        "rmaEagerInit" rma_eager_init int, "hostCftMode" host_cft_mode int,
        "nvlsHostMode" nvls_host_mode int,
    );
    let collective = fields!(
        CollConfig::new(), CollConfig,
        "size" size int, "magic" magic int, "version" version int, "ext" ext null,
        "minCTAs" min_ctas int, "maxCTAs" max_ctas int, "nvlsCTAs" nvls_ctas int,
        "cgaClusterSize" cga_cluster_size int, "algSelection" alg_selection null,
        "forceAlgSelection" force_alg_selection int, "CTAPolicy" cta_policy int,
        "userProfilerTag" user_profiler_tag int,
        "launchCompletionEvent" launch_completion_event null,
    );
    let simulation = fields!(
        SimInfo::new(), SimInfo,
        "size" size int, "magic" magic int, "version" version int,
        "estimatedTime" estimated_time float,
    );
    let encryption = fields!(
        EncryptionConfig::new(), EncryptionConfig,
        "size" size int, "magic" magic int, "version" version int, "mode" mode int, "psk" psk null,
    );
    vec![
        Mirror::of::<Config>("ncclConfig_t", "NCCL_CONFIG_INITIALIZER", config),
        Mirror::of::<CollConfig>("ncclCollConfig_t", "NCCL_COLLCONFIG_INITIALIZER", collective),
        Mirror::of::<SimInfo>("ncclSimInfo_t", "NCCL_SIM_INFO_INITIALIZER", simulation),
        Mirror::of::<EncryptionConfig>(
            "ncclEncryptionConfig_t",
            "NCCL_ENCRYPTION_CONFIG_INITIALIZER",
            encryption,
        ),
    ]
}

/// Returns the list nodes and other structs that are initialised with zeros.
fn nodes() -> Vec<Mirror> {
    let option = ConfigExt {
        next: null_mut(),
        vendor_id: 0,
        option_id: 0,
        value: ConfigExtValue { raw: null_mut() },
    };
    let option = fields!(
        option, ConfigExt,
        "next" next null, "key.vendorId" vendor_id int, "key.optionId" option_id int, "val" value,
    );
    let signal = RawWaitSignal { op_count: 0, peer: 0, signal_index: 0, context: 0 };
    let signal = fields!(
        signal, RawWaitSignal,
        "opCnt" op_count int, "peer" peer int, "sigIdx" signal_index int, "ctx" context int,
    );
    let resource = fields!(
        ResourceRequirements::NONE, ResourceRequirements,
        "next" next null, "bufferSize" buffer_size int, "bufferAlign" buffer_align int,
        "outBufferHandle" out_buffer_handle null, "ginSignalCount" gin_signal_count int,
        "ginCounterCount" gin_counter_count int, "outGinSignalStart" out_gin_signal_start null,
        "outGinCounterStart" out_gin_counter_start null,
    );
    let team = TeamRequirements {
        next: null_mut(),
        team: nccl::Team { n_ranks: 0, rank: 0, stride: 0 },
        multimem: false,
        out_multimem_handle: null_mut(),
    };
    let team = fields!(
        team, TeamRequirements,
        "next" next null, "team" team, "multimem" multimem int,
        "outMultimemHandle" out_multimem_handle null,
    );
    vec![
        Mirror::of::<ConfigExt>("ncclConfigExt_t", "{}", option),
        Mirror::of::<RawWaitSignal>("ncclWaitSignalDesc_t", "{}", signal),
        Mirror::of::<ResourceRequirements>("ncclDevResourceRequirements_t", "{}", resource),
        Mirror::of::<TeamRequirements>("ncclTeamRequirements_t", "{}", team),
    ]
}

/// Returns the structs that kernels read.
fn kernel_mirrors() -> Vec<Mirror> {
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
    let ll_a2a = fields!(
        nccl::LlA2aHandle { buffer: 0, n_slots: 0 }, nccl::LlA2aHandle,
        "bufHandle" buffer int, "nSlots" n_slots int,
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
        "worldGinBarrier" world_gin_barrier,
        "ginConnectionStride_rcp32" gin_connection_stride_rcp32,
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
        Mirror::of::<nccl::LlA2aHandle>("ncclLLA2AHandle_t", "{}", ll_a2a),
        Mirror::of::<nccl::MultimemHandle>("ncclMultimemHandle_t", "{}", multimem),
        Mirror::of::<nccl::ResourceWindow>("ncclResourceWindow_vidmem_t", "{}", window),
        Mirror::of::<nccl::DevComm>("ncclDevComm_t", "{}", comm),
        Mirror::of::<RawWindow>("ncclWindow_t", "{}", Vec::new()),
    ]
}

/// Returns the layout of the mirrors, in the format that the C++ program prints.
fn ours() -> String {
    let mut lines = String::new();
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

/// A C++ function that turns a value into a number: a pointer's address, a float's bits.
const NUMBER: &str = "template <class T> long long number(T v) {
  if constexpr (std::is_pointer_v<T>) return (long long)(intptr_t)v;
  else if constexpr (std::is_floating_point_v<T>) {
    unsigned bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
  } else return (long long)v;
}
";

fn program() -> String {
    let mut text = String::from(NUMBER) + "int main() {\n";
    for Mirror { name, initializer, fields, .. } in mirrors() {
        writeln!(
            text,
            "{{ {name} v = {initializer}; printf(\"{name} %zu %zu\\n\", sizeof v, alignof({name}));"
        )
        .unwrap();
        for (field, _, _, value) in fields {
            let (format, extra) = match value {
                Some(_) => (" %lld", format!(", number(v.{field})")),
                None => ("", String::new()),
            };
            writeln!(
                text,
                "printf(\"{name}.{field} %zu %zu{format}\\n\", offsetof({name}, {field}), \
                 sizeof v.{field}{extra});"
            )
            .unwrap();
        }
        text.push_str("(void)v; }\n");
    }
    text + "}\n"
}

#[test]
fn every_mirror_has_the_layout_and_the_defaults_of_nccls_headers() {
    if let Some(theirs) = printed(&program()) {
        compare(&ours(), &theirs);
    }
}
