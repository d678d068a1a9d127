/* RoPE frequencies with the scalings of the llama family. Formulas: RoFormer (arXiv:2104.09864); position interpolation
 * (arXiv:2306.15595); Llama 3.1's piecewise scaling (Meta's llama-models, apply_scaling); YaRN (arXiv:2309.00071). Computed in double. */
#include <math.h>

#include "model/model_read.h"

static const double TWO_PI = 6.283185307179586476925286766559;

/* Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended. */
static double scale_llama3(const struct model_config *c, double frequency)
{
  double wavelength = TWO_PI / frequency, context = c->rope_original_context;
  double low = c->rope_low_freq_factor, high = c->rope_high_freq_factor;
  if (wavelength > context / low) return frequency / c->rope_factor;
  if (wavelength < context / high) return frequency;
  double smooth = (context / wavelength - low) / (high - low);
  return (1 - smooth) * frequency / c->rope_factor + smooth * frequency;
}

/* The pair index whose frequency turns `rotations` times over the original context. */
static double yarn_pair_of(const struct model_config *c, double rotations)
{
  return c->rope_dims * log(c->rope_original_context / (rotations * TWO_PI)) / (2 * log((double)c->rope_theta));
}

static double scale_yarn(const struct model_config *c, double frequency, int pair)
{
  double low = floor(yarn_pair_of(c, c->yarn_beta_fast)), high = ceil(yarn_pair_of(c, c->yarn_beta_slow));
  if (low < 0) low = 0;
  if (high > c->rope_dims - 1) high = c->rope_dims - 1;
  if (high - low < 0.001) high = low + 0.001;
  double ramp = (pair - low) / (high - low); /* 0: keep, 1: interpolate */
  ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
  return frequency * (1 - ramp) + frequency / c->rope_factor * ramp;
}

float model_yarn_magnitude(float factor, float mscale) { return factor <= 1 ? 1.0f : 0.1f * mscale * logf(factor) + 1.0f; }

float model_rope_frequencies(const struct model_config *c, const float *factors, float *inv_freq)
{
  for (int pair = 0; pair < c->rope_dims / 2; pair++) {
    double frequency = pow((double)c->rope_theta, -2.0 * pair / c->rope_dims);
    if (factors) frequency /= factors[pair];
    switch (c->rope_scaling) {
    case ROPE_SCALING_NONE: break;
    case ROPE_SCALING_LINEAR: frequency /= c->rope_factor; break;
    case ROPE_SCALING_LLAMA3: frequency = scale_llama3(c, frequency); break;
    case ROPE_SCALING_YARN: frequency = scale_yarn(c, frequency, pair); break;
    }
    inv_freq[pair] = (float)frequency;
  }
  return c->rope_scaling == ROPE_SCALING_YARN ? c->yarn_attn_factor : 1.0f;
}
