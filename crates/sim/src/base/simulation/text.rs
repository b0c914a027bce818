//! The text form of the settings: `4,team=2,seed=7`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use devcomm_types::GinConnectionType;

use super::{
    COMPUTE_CAPABILITY, MULTIPROCESSORS, OLDEST_WITH_MULTICAST, PCT_STEPS, STACK_SIZE, Simulation,
    TIME_LIMIT,
};
use crate::base::error::{Error, Result};
use crate::base::schedule::{Lag, Schedule};

/// The largest number of choices of a text form.
const MAX_CHOICES: usize = 1 << 24;

impl fmt::Display for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.gpus)?;
        let mut set = |name: &str, value: &dyn fmt::Display, differs: bool| match differs {
            true => write!(f, ",{name}={value}"),
            false => Ok(()),
        };
        set("team", &self.team(), self.team() != self.gpus)?;
        let (major, minor) = self.compute_capability;
        // An older GPU has no multicast anyway.
        let has_multicast = self.compute_capability >= OLDEST_WITH_MULTICAST;
        set("multimem", &0, !self.multimem && has_multicast)?;
        let network = match self.network {
            GinConnectionType::None => "none",
            GinConnectionType::Rail => "rail",
            _ => "full",
        };
        set("network", &network, network != "full")?;
        let multiprocessors = self.multiprocessors.iter().map(ToString::to_string);
        let multiprocessors = multiprocessors.collect::<Vec<_>>().join("/");
        let differs = self.multiprocessors != [MULTIPROCESSORS];
        set("multiprocessors", &multiprocessors, differs)?;
        let differs = self.compute_capability != COMPUTE_CAPABILITY;
        set("compute_capability", &format_args!("{major}.{minor}"), differs)?;
        set("stack", &self.stack_size, self.stack_size != STACK_SIZE)?;
        set("steps", &self.step_limit.unwrap_or(0), self.step_limit.is_some())?;
        let seconds = self.time_limit.map_or(0, |limit| limit.as_secs().max(1));
        set("seconds", &seconds, self.time_limit != Some(TIME_LIMIT))?;
        set("seed", &self.seed.unwrap_or(0), self.seed.is_some())?;
        match &self.schedule {
            Schedule::Fair => {}
            Schedule::Pct { depth, steps: PCT_STEPS } => set("pct", depth, true)?,
            Schedule::Pct { depth, steps } => {
                set("pct", &format_args!("{depth}/{steps}"), true)?;
            }
            Schedule::Lag(lag) => set("lag", lag, true)?,
            Schedule::Choices(choices) => set("choices", &Sparse(choices), true)?,
        }
        set("preemptions", &self.preemptions.unwrap_or(0), self.preemptions.is_some())?;
        // A schedule by step implies preemption.
        let differs = self.preempt != self.schedule.is_by_step();
        set("preempt", &u8::from(self.preempt), differs)?;
        set("watch", &0, !self.watch)?;
        // A schedule with preemption implies `watch`, but not `races`.
        set("races", &0, !self.races && (self.watch || self.preempt))?;
        set("weak", &1, self.weak)?;
        set("flush", &1, self.flush)?;
        let timeline = self.timeline.as_ref().map(|path| path.display().to_string());
        set("timeline", &timeline.as_deref().unwrap_or_default(), timeline.is_some())
    }
}

/// The choices other than 0, each with its position.
struct Sparse<'a>(&'a [u32]);

impl fmt::Display for Sparse<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others = self.0.iter().enumerate().filter(|(_, choice)| **choice != 0);
        for (i, (position, choice)) in others.enumerate() {
            write!(f, "{}{position}:{choice}", if i == 0 { "" } else { "-" })?;
        }
        Ok(())
    }
}

impl Sparse<'_> {
    fn parse(text: &str) -> Option<Vec<u32>> {
        let mut choices = Vec::new();
        for part in text.split('-').filter(|_| !text.is_empty()) {
            let (position, choice) = part.split_once(':')?;
            let position: usize = position.parse().ok()?;
            if position < choices.len() || position >= MAX_CHOICES {
                return None;
            }
            choices.resize(position, 0);
            choices.push(choice.parse().ok()?);
        }
        Some(choices)
    }
}

impl Simulation {
    /// Returns the settings with one of the text form; `None` if no setting has this name.
    fn with(self, name: &str, value: &str) -> Option<Result<Self, String>> {
        let number = || {
            let number = value.parse::<u64>();
            number.map_err(|_| format!("{name} is {value:?}, which is not a number"))
        };
        let small = || number().map(|number| u32::try_from(number).unwrap_or(u32::MAX));
        Some(match name {
            "team" => small().map(|gpus| self.team_size(gpus as usize)),
            "multimem" => number().map(|on| self.multimem(on != 0)),
            "network" => match value {
                "none" => Ok(self.network(GinConnectionType::None)),
                "rail" => Ok(self.network(GinConnectionType::Rail)),
                "full" => Ok(self.network(GinConnectionType::Full)),
                _ => Err(format!("the network is {value:?}, not none, rail or full")),
            },
            "multiprocessors" => match value.split('/').map(str::parse).collect() {
                Ok::<Vec<u32>, _>(all) => Ok(self.multiprocessors_in_turn(all)),
                Err(_) => Err(format!("{name} is {value:?}, not numbers such as 132 or 132/114")),
            },
            "compute_capability" => {
                let number = |digits: &str| digits.parse::<u32>().ok();
                let parts = value.split_once('.').map(|(major, minor)| {
                    number(major).and_then(|major| Some((major, number(minor)?)))
                });
                match parts.flatten() {
                    Some((major, minor)) => Ok(self.compute_capability(major, minor)),
                    None => Err(format!("{name} is {value:?}, not two numbers such as 8.9")),
                }
            }
            "stack" => small().map(|bytes| self.stack_size(bytes as usize)),
            "steps" => number().map(|steps| self.step_limit(steps)),
            "seconds" => number().map(|limit| {
                let time_limit = (limit > 0).then_some(Duration::from_secs(limit));
                Self { time_limit, ..self }
            }),
            "seed" => number().map(|seed| self.seed(seed)),
            "pct" => {
                let (depth, steps) = match value.split_once('/') {
                    Some((depth, steps)) => (depth.parse(), steps.parse()),
                    None => (value.parse(), Ok(PCT_STEPS)),
                };
                match (depth, steps) {
                    (Ok(depth), Ok(steps)) => Ok(self.pct(depth).pct_steps(steps)),
                    _ => Err(format!(
                        "pct is {value:?}, not a depth, or a depth and a number of steps, such as \
                         3/5000"
                    )),
                }
            }
            "lag" => match Lag::of_name(value) {
                Some(lag) => Ok(self.lag(lag)),
                None => Err(format!("lag is {value:?}, not thread, warp, block or rank")),
            },
            "choices" => match Sparse::parse(value) {
                Some(choices) => Ok(self.choices(&choices)),
                None => Err(format!(
                    "choices is {value:?}, not positions in ascending order, each with the choice \
                     taken there, such as 3:1-7:2"
                )),
            },
            "preemptions" => small().map(|limit| self.preemptions(limit)),
            "preempt" => number().map(|on| self.preempt(on != 0)),
            "watch" => number().map(|on| self.watch(on != 0)),
            "races" => number().map(|on| self.races(on != 0)),
            "timeline" => Ok(self.timeline(value)),
            "weak" => number().map(|on| self.weak(on != 0)),
            "flush" => number().map(|on| self.flush(on != 0)),
            _ => return None,
        })
    }
}

impl FromStr for Simulation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        const FORM: &str = "a number of GPUs and settings, such as `4,team=2,seed=7`";
        let refuse =
            |what: &str| Err(Error::Settings(format!("{what} in {text:?}; expected {FORM}")));
        let mut parts = text.split(',').map(str::trim);
        let Some(Ok(gpus)) = parts.next().map(str::parse) else {
            return refuse("no number of GPUs");
        };
        let mut simulation = Self::new(gpus);
        for part in parts {
            let Some((name, value)) = part.split_once('=') else {
                return refuse(&format!("{part:?} has no value"));
            };
            simulation = match simulation.with(name, value) {
                Some(Ok(with)) => with,
                Some(Err(why)) => return refuse(&why),
                None => return refuse(&format!("unknown setting {name:?}")),
            };
        }
        simulation.checked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_from_text() {
        let read = |text: &str| text.parse::<Simulation>();
        assert_eq!(read("4").unwrap(), Simulation::new(4));
        let all = Simulation::new(8).team_size(2).multimem(false).seed(7).preempt(true);
        assert_eq!(
            read("8, team=2, multimem=0, seed=7, preempt=1").unwrap(),
            all.checked().unwrap()
        );
        let rails = Simulation::new(4).team_size(2).network(GinConnectionType::Rail);
        assert_eq!(read("4,team=2,network=rail").unwrap(), rails);
    }

    #[test]
    fn the_text_form_of_settings_gives_the_same_settings() {
        for text in [
            "4",
            "8,team=2,multimem=0,network=rail,multiprocessors=8,stack=131072,steps=9,seconds=3",
            "4,compute_capability=8.9,seed=3",
            "2,multiprocessors=3/2",
            "4,multimem=0,compute_capability=10.0",
            "2,seconds=0,watch=0",
            "2,flush=1",
            "4,seed=17,pct=3",
            "4,seed=17,pct=3/812,preempt=0",
            "4,seed=1,lag=rank,preempt=1",
            "2,choices=",
            "2,choices=3:1-7:2,preemptions=2",
        ] {
            assert_eq!(text.parse::<Simulation>().unwrap().to_string(), text);
        }
        // Preemption implies `watch`, but not the detection of races.
        let preempted = Simulation::new(2).races(false).watch(false).preempt(true);
        let parsed = preempted.to_string().parse::<Simulation>().unwrap();
        assert_eq!(parsed.checked().unwrap(), preempted.checked().unwrap());
        // What pct and lag imply is in the text too.
        let implied = "2,lag=warp".parse::<Simulation>().unwrap();
        assert_eq!(implied.to_string(), "2,seed=0,lag=warp");
        let trimmed = Simulation::new(2).choices(&[0, 1, 0, 2, 0, 0]);
        assert_eq!(trimmed.to_string(), "2,choices=1:1-3:2");
    }

    #[test]
    fn gpus_before_hopper_have_no_multicast() {
        for (text, multimem) in [
            ("2", true),
            ("2,compute_capability=8.9", false),
            ("2,compute_capability=8.9,multimem=1", false),
            ("2,compute_capability=10.0", true),
        ] {
            assert_eq!(text.parse::<Simulation>().unwrap().multimem, multimem, "{text}");
        }
    }

    #[test]
    fn text_that_is_no_setting_is_refused_with_the_form() {
        for (bad, why) in [
            ("", "no number of GPUs"),
            ("x", "no number of GPUs"),
            ("-1", "no number of GPUs"),
            ("0", "0 GPUs"),
            ("4,team", "\"team\" has no value"),
            ("4,team=3", "teams of 3"),
            ("4,speed=1", "unknown setting \"speed\""),
            ("4,compute_capability=9", "not two numbers such as 8.9"),
            ("4,compute_capability=8.x", "not two numbers such as 8.9"),
            ("4,compute_capability=6.1", "compute capability 6.1, but 7.0"),
            ("4,seed=x", "seed is \"x\", which is not a number"),
            ("4,network=1", "not none, rail or full"),
            ("4,pct=0", "depth 0"),
            ("4,pct=3/0", "3 in 0 steps"),
            ("4,pct=many", "3/5000"),
            ("4,lag=gpu", "not thread, warp, block or rank"),
            ("4,choices=1", "such as 3:1-7:2"),
            ("4,choices=7:1-3:1", "in ascending order"),
            ("4,choices=99999999:1", "such as 3:1-7:2"),
            ("4,choices=,seed=1", "only one of them"),
            ("4,preemptions=2", "for choices only"),
        ] {
            let refusal = bad.parse::<Simulation>().unwrap_err().to_string();
            assert!(refusal.starts_with("simulator: ") && refusal.contains(why), "{refusal}");
        }
        let refusal = "4,speed=1".parse::<Simulation>().unwrap_err().to_string();
        assert!(refusal.contains("speed") && refusal.contains("4,team=2"), "{refusal}");
    }
}
