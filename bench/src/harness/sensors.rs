//! Power, clock and temperature of a GPU during measurements, by NVML (nvidia-smi's library).

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use libloading::Library;

use crate::base::Spread;

/// Longest time between two samples; another sample is taken when a contender begins.
const PERIOD: Duration = Duration::from_millis(10);

const NVML_FI_DEV_POWER_INSTANT: u32 = 186;
const NVML_CLOCK_SM: u32 = 1;
const NVML_TEMPERATURE_GPU: u32 = 0;

/// NVML's `nvmlDevice_t`, as an address.
type Device = usize;

/// A function of a device and a selector, with a number as result: `nvmlDeviceGetClockInfo` and
/// `nvmlDeviceGetTemperature`.
type Query = unsafe extern "C" fn(Device, u32, *mut u32) -> i32;

/// `nvmlFieldValue_t`.
#[repr(C)]
#[derive(Default)]
struct Field {
    id: u32,
    scope: u32,
    timestamp: i64,
    latency: i64,
    value_type: u32,
    status: i32,
    /// A `u32` for power, in milliwatts.
    value: [u32; 2],
}

/// The sensors of one GPU.
pub struct Sensors {
    device: Device,
    fields: unsafe extern "C" fn(Device, i32, *mut Field) -> i32,
    clock: Query,
    temperature: Query,
    library: Library,
}

/// The values of the sensors; `None` where the GPU has no such sensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// Power of the GPU with its memory, in watts.
    pub power_w: Option<f64>,
    /// Clock of the multiprocessors in MHz.
    pub sm_mhz: Option<f64>,
    /// The temperature in degrees Celsius.
    pub temperature_c: Option<f64>,
}

impl Sensors {
    /// Opens NVML for the GPU with this PCI bus ID, which ends with a zero; `None` without NVML.
    pub fn open(pci_bus_id: &[u8]) -> Option<Self> {
        // SAFETY: opening NVML runs its initialisers, as intended, and it counts the calls of
        // `nvmlInit_v2`; the functions have the signatures of nvml.h, and `library` outlives them.
        unsafe {
            let library = Library::new("libnvidia-ml.so.1").ok()?;
            let init = library.get::<unsafe extern "C" fn() -> i32>(c"nvmlInit_v2").ok()?;
            let by_bus_id = *library
                .get::<unsafe extern "C" fn(*const u8, *mut Device) -> i32>(
                    c"nvmlDeviceGetHandleByPciBusId_v2",
                )
                .ok()?;
            let fields = *library.get(c"nvmlDeviceGetFieldValues").ok()?;
            let clock = *library.get(c"nvmlDeviceGetClockInfo").ok()?;
            let temperature = *library.get(c"nvmlDeviceGetTemperature").ok()?;
            if init() != 0 {
                return None;
            }
            let mut sensors = Self { device: 0, fields, clock, temperature, library };
            let found = by_bus_id(pci_bus_id.as_ptr(), &raw mut sensors.device);
            (found == 0).then_some(sensors)
        }
    }

    /// Reads the sensors.
    pub fn read(&self) -> Reading {
        let mut power = Field { id: NVML_FI_DEV_POWER_INSTANT, ..Field::default() };
        // SAFETY: `open` found the device, and `power` is one field.
        let status = unsafe { (self.fields)(self.device, 1, &raw mut power) };
        let number = |query: Query, selector| {
            let mut number = 0;
            // SAFETY: `open` found the device, and the function writes a `u32`.
            let status = unsafe { query(self.device, selector, &raw mut number) };
            (status == 0).then_some(f64::from(number))
        };
        Reading {
            power_w: ([status, power.status] == [0, 0]).then(|| f64::from(power.value[0]) / 1e3),
            sm_mhz: number(self.clock, NVML_CLOCK_SM),
            temperature_c: number(self.temperature, NVML_TEMPERATURE_GPU),
        }
    }
}

impl Drop for Sensors {
    fn drop(&mut self) {
        // SAFETY: `open` initialised the library, and this is its counterpart.
        unsafe {
            if let Ok(shut_down) =
                self.library.get::<unsafe extern "C" fn() -> i32>(c"nvmlShutdown")
            {
                shut_down();
            }
        }
    }
}

/// Runs `body`, and samples `read` in a thread meanwhile. `body` sends the index of a contender, of
/// `contenders`, before that runs. Also returns each contender's medians.
pub fn sample<R>(
    read: impl Fn() -> Reading + Send,
    contenders: usize,
    body: impl FnOnce(Sender<usize>) -> R,
) -> (R, Vec<Reading>) {
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        let sampler = scope.spawn(move || {
            let mut samples = vec![Vec::new(); contenders];
            let mut running = None;
            loop {
                match receiver.recv_timeout(PERIOD) {
                    // If several contenders began during a sample, the last one runs now.
                    Ok(next) => running = receiver.try_iter().last().or(Some(next)),
                    Err(RecvTimeoutError::Timeout) => {}
                    // `body` has ended, or panicked.
                    Err(RecvTimeoutError::Disconnected) => return samples,
                }
                if let Some(samples) = running.and_then(|i: usize| samples.get_mut(i)) {
                    samples.push(read());
                }
            }
        });
        let result = body(sender);
        // A sampler that panicked has no samples of any contender.
        let samples = sampler.join().unwrap_or_else(|_| vec![Vec::new(); contenders]);
        (result, samples.iter().map(|samples| Reading::median(samples)).collect())
    })
}

impl Reading {
    fn median(samples: &[Self]) -> Self {
        let median = |value: fn(&Self) -> Option<f64>| {
            Spread::of(samples.iter().filter_map(value)).map(|spread| spread.median)
        };
        Self {
            power_w: median(|sample| sample.power_w),
            sm_mhz: median(|sample| sample.sm_mhz),
            temperature_c: median(|sample| sample.temperature_c),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_contender_has_the_readings_of_its_time() {
        let (power, reads) = (AtomicU32::new(0), AtomicU32::new(0));
        let read = || {
            reads.fetch_add(1, Ordering::SeqCst);
            let power_w = Some(f64::from(power.load(Ordering::SeqCst)));
            Reading { power_w, ..Reading::default() }
        };
        let run = |running: Sender<usize>| {
            for (i, watts) in [(0, 100), (1, 300)] {
                power.store(watts, Ordering::SeqCst);
                running.send(i).unwrap();
                // One of them may see the next contender's power, but not the median.
                let enough = reads.load(Ordering::SeqCst) + 5;
                while reads.load(Ordering::SeqCst) < enough {
                    thread::yield_now();
                }
            }
            "done"
        };
        let (result, readings) = sample(read, 3, run);
        assert_eq!(result, "done");
        let expected = [Some(100.0), Some(300.0), None];
        assert_eq!(readings.iter().map(|reading| reading.power_w).collect::<Vec<_>>(), expected);
        assert!(readings.iter().all(|reading| reading.sm_mhz.is_none()));
    }

    #[test]
    fn a_field_has_nvmls_layout() {
        assert_eq!((size_of::<Field>(), std::mem::offset_of!(Field, value)), (40, 32));
    }
}
